"""What kvtailor gains and costs, against the alternatives: ``kvtailor bench`` and the scripts."""
