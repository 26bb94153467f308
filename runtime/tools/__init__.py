"""Plans as command lines and settings of stock tools."""
