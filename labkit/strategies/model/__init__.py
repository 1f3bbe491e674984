"""What every strategy does with a model before it is sharded, and the names of its
states.
"""
