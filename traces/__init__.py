"""Where traces come from: one adapter per exported-log format, and small real samples.

Each format is one module with its fields documented; `traces.registry` finds them all.
"""
