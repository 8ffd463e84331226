"""SPEAR's error compensators: where they are placed, how they are trained, and what they recover.

diagnosis     CKA damage of each module (eq. 6, 7)     selection   how many, which, and their rank (Algorithm 1)
compensators  A, B and the gate (eq. 3)                calibrating the two phases of training (eq. 5, Table 7)
low_rank      static terms: SVD, whitened SVD          memory      bytes of compensators, and what memory allows
quality       of directories, with their memory
measures      perplexity, KL, recovery by quartile     study       SPEAR and what it is compared with, on one model
"""
