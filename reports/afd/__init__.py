"""What a sweep over A/F ratios shows: its table, its figures and its page, all from the one document `twin.sweep/1`."""
