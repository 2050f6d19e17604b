"""What is committed as evidence: records, submissions, and where their arrays live."""
