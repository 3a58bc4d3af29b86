"""Parts that the programs here share: jobs, hosts, peers, and the report of the suite."""
