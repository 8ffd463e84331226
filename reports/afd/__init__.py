"""Reports of a sweep over A/F ratios: its table, figures and page, all from the document `twin.sweep/1`."""
