(async () => {
  const {document: json, roots} = JSON.parse(document.getElementById("charts").textContent)
  const item = {docid: "charts", roots, root_ids: Object.keys(roots)}
  await Bokeh.embed.embed_items({charts: json}, [item])
  for (const each of Bokeh.documents) paintCharts(each)
})()
