"""What was measured on the live plant, set beside what the twin says of the same requests. Knows no live plant."""
