"""SPEAR's error compensators: where they are placed, how they are trained, and what they recover.

selection     CKA damage of each module (eq. 6, 7); how many, which, and their rank (Algorithm 1)
compensators  A, B and the gate (eq. 3), and static terms: SVD, whitened SVD
calibrating   the two phases of training (eq. 5, Table 7)
costs         bytes of compensators, what memory allows, and their time
measures      perplexity, KL, recovery by quartile, bytes of models
runs          quantisation, diagnosis and compensation of one model directory
"""
