# Read by bash before a walk: what a newcomer does with an editor.

# save_block PAGE LANGUAGE NUMBER: print a code block of a page, to be saved as a file.
save_block() {
  awk -v language="$2" -v wanted="$3" '
    /^```/ && inside { inside = 0; if (count == wanted) exit; next }
    /^```/ { inside = ($0 == "```" language); if (inside) count++; else inside = -1; next }
    inside == 1 && count == wanted { print }
    inside == -1 && /^```/ { inside = 0 }
  ' "$PAGES/$1"
}

# fail MESSAGE: end the walk.
fail() {
  echo "walk failed: $*" >&2
  exit 1
}
