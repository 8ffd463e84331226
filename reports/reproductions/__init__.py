"""Tables and figures of reproduced papers: what was printed beside what is computed."""
