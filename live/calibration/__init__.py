"""`twin calibrate run`: measures a model's operations on this machine and writes a calibration file.

    plan           which points are measured (grids.yaml), which are held out, and the measurements so far, on disk
    operations     a point as a call that can be timed, and whole steps, to check the sum of the parts
    communication  round trips between two processes, and all-reduces among several
    assembling     from measurements to the file
    calibrate      rounds over the points, and all of it, for the command

Import from the modules.
"""
