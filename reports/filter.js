// Shows the rows whose values are among those chosen in each filter; no choice means all.
const count = source.get_length()
const kept = new Array(count).fill(true)
for (const [key, choice] of Object.entries(choices))
  if (choice.value.length) for (let i = 0; i < count; i++) kept[i] &&= choice.value.includes(String(source.data[key][i]))
view.filter.booleans = kept
source.change.emit()
told.text = `${kept.filter(Boolean).length} of ${count} rows.`
