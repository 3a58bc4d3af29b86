@@shebang
# Nodes for a session at the terminal; run this script with bash. In its shell `hpcdp launch -- PROGRAM` uses all of
# them, and exit gives them back.
options=(
@@options
)

@@environment

exec salloc "${options[@]}" @@program
