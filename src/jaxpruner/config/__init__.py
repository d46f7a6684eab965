"""Configuration: strings and mappings to objects, and back.

codec          names of types, schedules, distributions and parts, both ways
schedule       which schedule the keys of a configuration mean
distribution   which distribution they mean
"""
