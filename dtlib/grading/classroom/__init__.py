"""Who is asked and what is told whom: a learner's own `check`, and a class's notebooks in, reports out."""
