"""The calibration file: α and β of attention, FFN and communication, with units and provenance.

    file_format   the schema
    estimators    lines from fitted estimators, and back
    measurements  a calibration fitted to a table of measured times

Import from the modules: this package loads none of them.
"""
