"""Reports of serving systems: tables for a terminal, figures, HTML pages, and a trace for Perfetto."""
