"""Configuration: from strings and mappings to objects, and back.

codec          reads and writes names of types, schedules, distributions, parts
schedule       builds the schedule that a configuration describes
distribution   builds the distribution that a configuration describes
"""
