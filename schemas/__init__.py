"""What the stages agree on: the tables, the study file, the hardware catalogue, the manifest, the errors.

This package imports nothing else of Preplay, and every other package may import it.
"""
