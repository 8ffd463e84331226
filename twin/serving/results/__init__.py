"""Results of runs: summaries, intervals, time series and comparisons with a measured run."""
