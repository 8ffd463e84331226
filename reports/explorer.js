// Shows the points by the fields chosen. Runs when the page is ready, and whenever a choice or a filter changes.
const data = source.data
const count = source.get_length()
const [logX, logY, joined, pareto] = [0, 1, 2, 3].map((flag) => choices.scales.active.includes(flag))

function numbers(key) {
  return fields[key].categories ? data[`${key}#`] : data[key]
}

// Filters: a choice of values, none of which means all, or a range.
const kept = new Array(count).fill(true)
for (const [key, filter] of Object.entries(filters)) {
  const values = data[key]
  if (filter.type === "MultiChoice") {
    if (filter.value.length) for (let i = 0; i < count; i++) kept[i] &&= filter.value.includes(String(values[i]))
  } else {
    const [low, high] = filter.value
    const slack = 1e-9 * (filter.end - filter.start)
    const whole = low <= filter.start && high >= filter.end
    if (!whole) for (let i = 0; i < count; i++) kept[i] &&= values[i] >= low - slack && values[i] <= high + slack
  }
}
view.filter.booleans = kept

// Axes.
function place(side, key, log) {
  const field = fields[key], parts = axes[side]
  const axis = side === "x" ? chart.below[0] : chart.left[0]
  const grid = chart.center.find((each) => each.type === "Grid" && each.dimension === (side === "x" ? 0 : 1))
  const positive = !field.categories && Array.from(numbers(key)).every((value) => !(value <= 0))
  const logarithmic = log && positive
  axis.axis_label = field.label
  if (field.categories) {
    parts.fixed.ticks = field.categories.map((_, i) => i)
    axis.major_label_overrides = new Map(field.categories.map((text, i) => [i, text]))
    axis.ticker = parts.fixed
  } else {
    axis.major_label_overrides = new Map()
    axis.ticker = logarithmic ? parts.log_ticker : parts.basic_ticker
  }
  if (grid) grid.ticker = axis.ticker
  chart[`${side}_scale`] = logarithmic ? parts.log : parts.linear
  goals[side].visible = field.goal != null
  if (field.goal != null) goals[side].location = field.goal
}
const x = choices.x.value, y = choices.y.value, colour = choices.colour.value
place("x", x, logX)
place("y", y, logY)

// Colours: a scale for numbers, a colour each for categories, with a legend.
const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;")
const mapper = bar.color_mapper
bar.visible = colour !== "" && !fields[colour].categories
let legend = ""
if (colour === "") {
  data["#colour"] = new Float64Array(count).fill(NaN)
} else {
  const field = fields[colour]
  data["#colour"] = Float64Array.from(numbers(colour))
  const texts = field.categories
  if (texts) {
    const few = texts.length <= categories.length
    const step = (palette.length - 1) / Math.max(texts.length - 1, 1)
    mapper.palette = few ? categories.slice(0, texts.length) : texts.map((_, i) => palette[Math.round(i * step)])
    mapper.low = -0.5
    mapper.high = texts.length - 0.5
    const entries = texts.map((text, i) => `<span style="color: ${mapper.palette[i]}">●</span> ${escape(text)}`)
    legend = `${escape(field.label)}: ${entries.slice(0, 20).join(", ")}${texts.length > 20 ? ", …" : ""}. `
  } else {
    const known = Array.from(data["#colour"]).filter((value) => !Number.isNaN(value))
    mapper.palette = palette
    mapper.low = Math.min(...known)
    mapper.high = Math.max(...known, mapper.low + 1e-12)
    bar.ticker.ticks = [0, 1, 2, 3, 4].map((i) => mapper.low + (i * (mapper.high - mapper.low)) / 4)
  }
  bar.title = field.label
}

// Points, and lines through those that differ in the horizontal field alone.
data["#x"] = Float64Array.from(numbers(x))
data["#y"] = Float64Array.from(numbers(y))
const shown = [...kept.keys()].filter((i) => kept[i] && !Number.isNaN(data["#x"][i]) && !Number.isNaN(data["#y"][i]))
const paths = new Map()
if (joined && fields[x].setting && !fields[x].categories) {
  // A setting that follows from the horizontal one, as fields that vary together do, tells no lines apart.
  const different = (key) => new Set(shown.map((i) => JSON.stringify([data[x][i], key && data[key][i]]))).size
  const places = different(null)
  const others = Object.keys(fields).filter((key) => fields[key].setting && key !== x && different(key) > places)
  for (const i of shown) {
    const name = JSON.stringify(others.map((key) => data[key][i]))
    if (!paths.has(name)) paths.set(name, [])
    paths.get(name).push(i)
  }
}
const paths_x = [], paths_y = [], paths_colour = []
for (const path of paths.values()) {
  path.sort((i, j) => data["#x"][i] - data["#x"][j])
  if (path.length < 2 || new Set(path.map((i) => data["#x"][i])).size < path.length) continue
  paths_x.push(path.map((i) => data["#x"][i]))
  paths_y.push(path.map((i) => data["#y"][i]))
  paths_colour.push(data["#colour"][path[0]])
}
lines.data = {xs: paths_x, ys: paths_y, colour: paths_colour}

// The Pareto front: the points that no other beats in both fields, where it is known which way is better.
const better = [fields[x].better, fields[y].better]
const front_x = [], front_y = []
if (pareto && better[0] && better[1]) {
  const order = [...shown].sort((i, j) => better[0] * (data["#x"][j] - data["#x"][i]) || better[1] * (data["#y"][j] - data["#y"][i]))
  let best = -Infinity
  for (const i of order) {
    if (better[1] * data["#y"][i] > best) {
      best = better[1] * data["#y"][i]
      front_x.push(data["#x"][i])
      front_y.push(data["#y"][i])
    }
  }
}
front.data = {x: front_x, y: front_y}
source.change.emit()

// What is shown, in words.
const notes = [x, y, ...(colour && colour !== x && colour !== y ? [colour] : [])]
  .filter((key) => fields[key].help)
  .map((key) => `<b>${escape(fields[key].label)}</b>: ${escape(fields[key].help)}.` +
    (fields[key].goal != null ? ` Goal: ${fields[key].goal}.` : ""))
if (pareto && !(better[0] && better[1])) notes.push("A Pareto front needs two metrics of which it is known which way is better.")
told.text = `${legend}${kept.filter(Boolean).length} of ${count} points. ` + notes.join(" ")
