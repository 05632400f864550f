"""Search by vectors and by words, and the scores of ranked results. Knows no model."""
