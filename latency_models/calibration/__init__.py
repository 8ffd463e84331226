"""The calibration file: α and β of attention, FFN and communication (`file_format`), and its fit (`fitting`)."""
