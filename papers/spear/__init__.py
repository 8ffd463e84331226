"""The SPEAR paper: `reproduction` computes its tables and figures anew; `data/` holds the published values."""
