"""`twin calibrate run`: measures a model's operations on this machine and writes a calibration file.

    grid           which points are measured, and which are held out
    operations     a point as a call that can be timed, and whole steps, to check the sum of the parts
    communication  round trips between two processes, and all-reduces among several
    journal        the measurements so far, on disk
    measuring      rounds over the grid
    assembling     from measurements to the file
    calibrate      all of it, for the command

Import from the modules.
"""
