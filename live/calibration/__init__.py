"""`twin calibrate run`: measures a model's operations on this machine, and writes what simulations need of them.

    grid           which points are measured, and which of them are held out
    operations     a point as something that can be timed
    whole_steps    whole steps composed of the operations, to hold the sum of the parts against
    messages       there and back between two processes
    journal        what has been measured so far, on disk
    measuring      rounds over the grid
    assembling     from measurements to the file

Import from the modules.
"""
