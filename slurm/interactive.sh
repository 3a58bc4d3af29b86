@@shebang
# Nodes for an interactive session; run this script with bash. In its shell
# `hpcdp launch -- PROGRAM` uses all nodes, and `exit` releases them.
options=(
@@options
)

@@environment

exec salloc "${options[@]}" @@program
