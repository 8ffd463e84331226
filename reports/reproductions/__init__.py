"""Tables and figures of reproduced papers: published beside computed values."""
