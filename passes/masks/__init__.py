"""What a mask means: interpreted, put into a normal form, read as flags."""
