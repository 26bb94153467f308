"""A plan derived again, explained and judged, without model or machine."""
