"""What makes an engine a rank: runs its cells, answers the notebook."""
