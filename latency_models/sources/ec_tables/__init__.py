"""Step times of 4-bit models with error compensators (SPEAR 4.3)."""
