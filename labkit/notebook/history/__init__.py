"""What ranks have reported of a run: records, curves, stragglers, consistency of
replicas.
"""
