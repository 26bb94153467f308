"""The click commands of atsplan, one file per stage; only these and atsplan.py print."""
