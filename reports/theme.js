// Light and dark: the page's colours are CSS variables; those of charts are properties of their models.
(() => {
  const THEMES = {
    light: {paper: "#ffffff", ink: "#1c1c1c", soft: "#5a5f66", line: "#e3e5e8"},
    dark: {paper: "#14171b", ink: "#e6e7e9", soft: "#a3a9b1", line: "#30353c"},
  }
  // Properties by colour; a model has those of its kind: plots, axes, grids, titles, legends, colour bars.
  const COLOURS = {
    paper: ["background_fill_color", "border_fill_color"],
    ink: ["axis_label_text_color", "label_text_color", "title_text_color"],
    soft: ["major_label_text_color", "axis_line_color", "major_tick_line_color", "minor_tick_line_color"],
    line: ["outline_line_color", "grid_line_color"],
  }
  const PAINTED = /^(Plot|Figure|GridPlot|.*Axis|Grid|Title|Legend|ColorBar)$/
  const root = document.documentElement
  const stored = (() => { try { return localStorage.getItem("theme") } catch { return null } })()
  const system = matchMedia("(prefers-color-scheme: dark)")
  const current = () => root.dataset.theme

  function paint(doc) {
    const theme = THEMES[current()]
    for (const model of doc._all_models.values()) {
      if (!PAINTED.test(model.type)) continue
      for (const [colour, names] of Object.entries(COLOURS))
        for (const name of names)
          if (name in model.properties) model[name] = theme[colour]
      if (model.type === "Title") model.text_color = theme.ink
    }
  }

  function set(theme) {
    root.dataset.theme = theme
    const button = document.getElementById("theme")
    if (button) button.textContent = theme === "dark" ? "light" : "dark"
    if (window.Bokeh) for (const doc of Bokeh.documents) paint(doc)
  }

  set(stored ?? (system.matches ? "dark" : "light"))
  system.addEventListener("change", () => { if (!stored) set(system.matches ? "dark" : "light") })
  addEventListener("DOMContentLoaded", () => {
    set(current())
    document.getElementById("theme").addEventListener("click", () => {
      set(current() === "dark" ? "light" : "dark")
      try { localStorage.setItem("theme", current()) } catch { /* a page without storage forgets */ }
    })
  })
  window.paintCharts = paint
})()
