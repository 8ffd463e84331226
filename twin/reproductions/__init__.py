"""The papers' tables and figures, computed again beside the published values."""
