"""SPEAR's error compensators: where they are placed, how they are trained, and what they recover.

selection     CKA damage of each module (eq. 6, 7); how many, which, their rank (Algorithm 1), bytes and time
compensators  A, B and the gate (eq. 3), and static terms: SVD, whitened SVD
calibrating   the two phases of training (eq. 5, Table 7)
measures      perplexity, KL, recovery by quartile, bytes of models
runs          quantisation, diagnosis and compensation of one model directory
"""
