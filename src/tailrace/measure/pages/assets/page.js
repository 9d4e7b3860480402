// Draws the figures of the section that is shown; those of the others wait until it is their turn.
(function () {
  const base = {
    height: 330,
    margin: { l: 58, r: 58, t: 40, b: 44 },
    showlegend: true,
    font: { family: 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif', size: 12, color: "#1a202c" },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    legend: { orientation: "h", x: 0, y: 1.0, yanchor: "bottom" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: "#cbd5e0", activecolor: "#2b6cb0" },
    hovermode: "closest",
  };
  const config = {
    responsive: true,
    displaylogo: false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    displayModeBar: "hover",
  };
  const axis = { gridcolor: "#edf2f7", zerolinecolor: "#e2e8f0", linecolor: "#cbd5e0", automargin: true };
  const sections = Array.from(document.querySelectorAll("section[data-figures]"));
  const buttons = Array.from(document.querySelectorAll("nav button"));

  function draw(section) {
    if (section.dataset.drawn) return;
    section.dataset.drawn = "yes";
    for (const figure of JSON.parse(document.getElementById(section.dataset.figures).textContent)) {
      const layout = Object.assign({}, base, figure.layout);
      for (const name of ["xaxis", "yaxis", "yaxis2"]) {
        if (layout[name] || name !== "yaxis2") layout[name] = Object.assign({}, axis, layout[name]);
      }
      Plotly.newPlot(figure.id, figure.traces, layout, config);
    }
  }

  function show(index) {
    sections.forEach(function (section, i) { section.hidden = i !== index; });
    buttons.forEach(function (button, i) { button.setAttribute("aria-selected", String(i === index)); });
    if (sections[index]) draw(sections[index]);
  }

  buttons.forEach(function (button, i) { button.addEventListener("click", function () { show(i); }); });
  show(0);
})();
