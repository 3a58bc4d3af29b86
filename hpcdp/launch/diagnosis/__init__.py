"""What ``hpcdp doctor`` and ``hpcdp info`` find out about an installation and its machine."""
