"""The schema of what a run leaves behind: metrics lines and the summary. Written by `runtime`, read by `report`."""
