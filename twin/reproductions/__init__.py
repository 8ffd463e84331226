"""The papers' tables and figures, computed again and set beside what was printed."""
