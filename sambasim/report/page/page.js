"use strict";
// Draws the figures, fills the tables, and shows the chosen section. Data enters the page as text, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const byId = (id) => document.getElementById(id);

  function element(name, properties = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(properties)) {
      if (key === "style") made.style.cssText = value;
      else if (key === "onclick") made.addEventListener("click", value);
      else made[key] = value;
    }
    made.append(...children);
    return made;
  }

  function svg(name, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  // The formats of sambasim/units.py.
  const scaled = (units) => (value) => {
    const [name, factor, digits] = units.find(([, least]) => value >= least) || units[units.length - 1];
    return `${(value / factor).toFixed(digits)} ${name}`.trim();
  };
  const seconds = scaled([["s", 1, 2], ["ms", 1e-3, 1], ["us", 1e-6, 1]]);
  const bytes = scaled([["TiB", 2 ** 40, 1], ["GiB", 2 ** 30, 1], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1], ["B", 1, 0]]);
  const count = scaled([["T", 1e12, 1], ["G", 1e9, 1], ["M", 1e6, 1], ["k", 1e3, 1], ["", 1, 0]]);
  const flops = (value) => `${count(value)}${value < 1e3 ? " " : ""}FLOP`;
  const percent = (part) => `${(100 * part).toFixed(1)} %`;
  const whole = (part) => `${Math.round(100 * part)} %`;
  const orNothing = (format) => (value) => (value ? format(value) : "-");

  // Tables: columns of {head, value, text, width, number, name, cell}; rows are sorted by `value`.
  const MOST_ROWS = 250;
  function liveTable(id, rows, columns, options = {}) {
    const place = byId(id);
    if (!place) return null;
    const box = document.querySelector(`input[data-for="${id}"]`);
    const counter = document.querySelector(`.count[data-for="${id}"]`);
    const words = rows.map((row) => [...columns.map((column) => (column.text || column.value)(row)), options.words ? options.words(row) : ""].join("\n").toLowerCase());
    const body = element("tbody");
    const more = element("div", { className: "more" });
    let sorted = options.sorted || { column: 0, down: false };
    let limit = MOST_ROWS;

    const heads = columns.map((column, number) => {
      const mark = element("span");
      const sort = () => {
        sorted = { column: number, down: sorted.column === number ? !sorted.down : Boolean(column.number && number) };
        fill();
      };
      const head = element("th", { className: column.number ? "number" : "", style: `width:${column.width || "auto"}` },
        element("button", { type: "button", onclick: sort, title: `Sort by ${column.head}` }, column.head, mark));
      return { head, mark };
    });

    function rowOf(row) {
      const line = element("tr", options.row ? options.row(row) : {});
      for (const column of columns) {
        if (column.cell) {
          line.append(column.cell(row));
          continue;
        }
        const text = String((column.text || column.value)(row));
        line.append(element("td", { className: column.number ? "number" : column.whole ? "name whole" : column.name ? "name" : "", title: text }, text));
      }
      return line;
    }

    function fill() {
      const wanted = (box ? box.value : "").toLowerCase().split(/\s+/).filter(Boolean);
      const found = rows.filter((_, number) => wanted.every((word) => words[number].includes(word)));
      const { value } = columns[sorted.column];
      const order = (a, b) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -1 : 1);
      found.sort((a, b) => (sorted.down ? -1 : 1) * order(value(a), value(b)));
      const shown = found.slice(0, limit).flatMap((row) => (row.opened ? [row, ...row.members] : [row]));
      body.replaceChildren(...shown.map(rowOf));
      heads.forEach(({ head, mark }, number) => {
        const here = number === sorted.column;
        mark.textContent = here ? (sorted.down ? " ↓" : " ↑") : "";
        head.ariaSort = here ? (sorted.down ? "descending" : "ascending") : "none";
      });
      if (counter) counter.textContent = wanted.length ? `${found.length} of ${rows.length}` : options.count || `${rows.length}`;
      const hidden = found.length - limit;
      const all = () => { limit = Infinity; fill(); };
      more.replaceChildren(...(hidden > 0
        ? [element("button", { type: "button", onclick: all }, `Show ${hidden} more`)]
        : found.length ? [] : ["No matches."]));
    }

    if (box) box.addEventListener("input", () => { limit = MOST_ROWS; fill(); });
    place.append(element("table", {}, element("thead", {}, element("tr", {}, ...heads.map(({ head }) => head))), body), more);
    fill();
    return { fill };
  }

  // Sections: rows of sections.py.
  const FIELDS = ["number", "kind", "name", "operators", "compute", "memory", "fill", "launch", "predicted", "read", "written", "resident", "flops", "bound", "colour", "line", "runs", "units", "chip"];
  const sections = (data.sections || []).map((row) => Object.fromEntries(row.map((value, at) => [FIELDS[at], value])))
    .map((section) => ({ ...section, total: section.runs * section.predicted, members: [] }));
  // Equal sections of repeated layers are one row; its button shows them.
  const folds = (data.folds || []).map((numbers) => (numbers.length === 1 ? sections[numbers[0]] : {
    ...sections[numbers[0]],
    members: numbers.map((number) => sections[number]),
    total: numbers.reduce((sum, number) => sum + sections[number].total, 0),
    runs: numbers.reduce((sum, number) => sum + sections[number].runs, 0),
  }));
  const longest = Math.max(...folds.map((fold) => fold.total), 0) || 1;
  let chosen = data.first_section || 0;

  function miniBar(section) {
    const hidden = section.compute > section.memory ? "memory" : "compute";
    const spans = data.parts.filter(([part]) => part !== hidden && section[part] > 0).map(([part, colour]) =>
      element("span", { style: `width:${(100 * section.runs * section[part]) / longest}%;background:${colour}`, title: `${part} ${seconds(section[part])}` }));
    return element("td", {}, element("div", { className: "mini" }, ...spans));
  }

  function bound(section) {
    return element("span", { className: "bound" }, element("i", { style: `background:${section.colour}` }), section.bound);
  }

  const computeShare = (section) => section.compute / section.predicted;
  const memoryShare = (section) => section.memory / section.predicted;

  function runsOf(section) {
    if (!section.members.length) return element("td", { className: "number" }, String(section.runs));
    const label = `×${section.runs} ${section.opened ? "▾" : "▸"}`;
    const toggle = (event) => {
      event.stopPropagation();
      section.opened = !section.opened;
      sectionTable.fill();
    };
    const title = `${section.members.length} equal sections: ${section.opened ? "fold" : "unfold"}`;
    return element("td", { className: "number" }, element("button", { type: "button", className: "fold", onclick: toggle, title, ariaExpanded: String(Boolean(section.opened)) }, label));
  }

  const inOpen = new Set(folds.flatMap(({ members }) => members));
  // The end of a name says more than its beginning.
  const tail = (text) => (text.length > 17 ? `…${text.slice(-16)}` : text);
  const isChosen = (section) => section.number === chosen || (!section.opened && section.members.some(({ number }) => number === chosen));
  const sectionTable = sections.length && liveTable("sections-rows", folds, [
    { head: "no.", value: (s) => s.number, number: true, width: "56px" },
    { head: "costliest line", value: (s) => s.line, whole: true, width: "252px" },
    { head: "total", value: (s) => s.total, text: (s) => seconds(s.total), number: true, width: "84px" },
    { head: "runs", value: (s) => s.runs, number: true, width: "80px", cell: runsOf },
    { head: "each", value: (s) => s.predicted, text: (s) => seconds(s.predicted), number: true, width: "80px" },
    { head: "made of", value: (s) => s.total, text: () => "", width: "104px", cell: miniBar },
    { head: "kind", value: (s) => s.kind, width: "92px" },
    { head: "name", value: (s) => s.name, cell: (s) => element("td", { className: "name", title: s.name }, tail(s.name)) },
    { head: "PCUs", value: (s) => s.units, text: (s) => whole(s.units), number: true, width: "68px" },
    { head: "PMUs", value: (s) => s.chip, text: (s) => whole(s.chip), number: true, width: "68px" },
    { head: "traffic", value: (s) => s.read + s.written, text: (s) => bytes(s.read + s.written), number: true, width: "90px" },
    { head: "bound by", value: (s) => s.bound, width: "106px", cell: (s) => element("td", { title: s.bound }, bound(s)) },
  ], {
    sorted: { column: 2, down: true },
    count: folds.length < sections.length ? `${folds.length} rows of ${sections.length} sections` : "",
    words: (s) => s.members.map(({ name }) => name).join(" "),
    row: (s) => ({ className: `open${s.members.length || !inOpen.has(s) ? "" : " member"}${isChosen(s) ? " chosen" : ""}`, onclick: () => choose(s.number, true) }),
  });

  // Operators: rows of sections.py, whose texts are indices into `strings`.
  const strings = data.strings || [];
  const operators = (data.operators || []).map(([place, section, working, operator, kind, type, name, module, file, code, line]) => ({
    place, section, working, line, operator: strings[operator], kind: strings[kind], type: strings[type],
    name: strings[name], module: strings[module], file: strings[file], code: strings[code],
  }));
  const short = (operator) => operator.replace(/^aten\./, "").replace(/\.default$/, "");
  const where = (o) => (o.file ? `${o.file}:${o.line}` : "");

  liveTable("operators-rows", operators, [
    { head: "no.", value: (o) => o.place, number: true, width: "56px" },
    { head: "line", value: where, whole: true, width: "252px" },
    { head: "section", value: (o) => o.section, text: (o) => (o.section === null ? "-" : o.section), number: true, width: "76px" },
    { head: "operator", value: (o) => o.operator, text: (o) => short(o.operator), name: true, width: "17%" },
    { head: "kind", value: (o) => o.kind, width: "112px" },
    { head: "result", value: (o) => o.type, name: true, width: "16%" },
    { head: "module", value: (o) => o.module, name: true, width: "14%" },
    { head: "source", value: (o) => o.code, name: true },
  ], {
    words: (o) => `${o.operator} ${o.name}`,
    row: (o) => ({
      className: `${o.working ? "" : "free"}${o.section === null ? "" : " open"}`,
      title: o.name,
      onclick: () => o.section !== null && choose(o.section, true),
    }),
  });

  // The chosen section: stages as rows, buffers as arcs beside them.
  const GUTTER = 100;

  // `middles` are the vertical centres of the rows.
  function arcs(stages, middles, height) {
    const most = Math.max(1, ...stages.flatMap(([, , , , , reads]) => reads.map(([, size]) => size)));
    const x = GUTTER - 9;
    const curves = stages.flatMap(([, , , , , reads], to) => reads.map(([from, size]) => {
      const reach = Math.min(1.25 * GUTTER, 20 * Math.sqrt(to - from));
      const [y, end] = [middles[from] + 3, middles[to] - 3];
      const d = `M ${x} ${y} C ${x - reach} ${y}, ${x - reach} ${end}, ${x} ${end}`;
      const line = { fill: "none", stroke: "#0072b2", "stroke-opacity": "0.55", "stroke-width": 1 + 2.5 * (size / most) };
      return svg("path", { d, ...line }, svg("title", {}, `from ${from} to ${to}: rows of ${bytes(size)}`));
    }));
    const dots = stages.map((_, number) => svg("circle", { cx: x, cy: middles[number], r: 4, fill: "#1b1f24" }));
    return svg("svg", { width: GUTTER, height }, ...curves, ...dots);
  }

  function stageTable(stages) {
    const most = Math.max(1, ...stages.map(([, , , , work]) => work));
    const columns = [["no.", "42px", true], ["line", "246px"], ["operator", "166px"], ["source"], ["one row passed on", "92px", true], ["read from memory", "86px", true],
      ["weights", "80px", true], ["written to memory", "86px", true], ["products", "138px"]];
    const head = columns.map(([name, width, number]) =>
      element("th", { className: number ? "number" : "", style: `width:${width || "auto"}` }, name));
    const rows = stages.map(([node, streamed, resident, written, work, , handed], number) => {
      const o = operators[node];
      const cell = (text, className = "", title = text) => element("td", { className, title }, text);
      const bar = element("span", { style: `display:inline-block;height:9px;width:${(32 * work) / most}px;background:#0072b2;margin-right:6px` });
      return element("tr", {},
        cell(String(number), "number"),
        cell(where(o), "name whole"),
        cell(short(o.operator), "name", `${o.operator} → ${o.type}\n${o.name}\n${o.module}`),
        cell(o.code, "name"),
        cell(orNothing(bytes)(handed), "number"),
        cell(orNothing(bytes)(streamed), "number"),
        cell(orNothing(bytes)(resident), "number"),
        cell(orNothing(bytes)(written), "number"),
        element("td", { title: work ? flops(work) : "" }, ...(work ? [bar, flops(work)] : ["-"])));
    });
    return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  }

  function showSection() {
    const section = sections[chosen], stages = data.pipeline[chosen];
    byId("pipeline-choice").value = String(chosen);
    const fact = (name, text) => element("span", { className: "bound" }, `${name} `, element("b", {}, text));
    byId("pipeline-head").replaceChildren(element("p", {},
      ...["predicted", "compute", "memory", "fill", "launch"].map((part) => fact(part, seconds(section[part]))),
      fact("operators", String(section.operators)), fact("compute in use", percent(computeShare(section))), fact("memory in use", percent(memoryShare(section))),
      element("span", { className: "bound" }, "bound by ", bound(section))), element("p", {},
      fact("reads", bytes(section.read)), fact("weights", bytes(section.resident)), fact("writes", bytes(section.written)),
      fact("costliest line", section.line || "none"),
      fact("PCUs", whole(section.units)), fact("PMUs", whole(section.chip)),
      fact("on the chip", `${bytes(data.on_chip[chosen])} of ${bytes(data.chip)}`),
      fact("products", section.flops ? flops(section.flops) : "none")));
    const place = byId("pipeline-stages");
    if (stages.length) {
      const gutter = element("div"), table = stageTable(stages);
      place.replaceChildren(element("div", { className: "stages" }, gutter, table));
      const middles = Array.from(table.tBodies[0].rows, (row) => row.offsetTop + row.offsetHeight / 2);
      gutter.append(arcs(stages, middles, table.offsetHeight));
    } else {
      const what = section.kind === "OPT"
        ? "The optimizer reads parameters, gradients and states of one group, and writes parameters and states."
        : "Reads all gradients and computes their norm.";
      place.replaceChildren(element("p", { className: "muted" }, what));
    }
  }

  function choose(number, scroll) {
    chosen = number;
    showSection();
    sectionTable.fill();
    markBox();
    if (scroll) byId("pipeline").scrollIntoView();
  }

  // The graph of sections: a box is chosen by a click or a key, and its curves are marked while it has the pointer.
  const boxes = Array.from(document.querySelectorAll(".graph .box"));
  function markBox() {
    for (const box of boxes) {
      box.classList.toggle("chosen", Number(box.dataset.first) <= chosen && chosen <= Number(box.dataset.last));
    }
  }
  for (const box of boxes) {
    const curves = document.querySelectorAll(`.graph path[data-from="${box.dataset.box}"], .graph path[data-to="${box.dataset.box}"]`);
    const mark = (on) => () => curves.forEach((curve) => curve.classList.toggle("lit", on));
    for (const [event, on] of [["mouseenter", true], ["mouseleave", false], ["focus", true], ["blur", false]]) {
      box.addEventListener(event, mark(on));
    }
    const open = () => choose(Number(box.dataset.first), true);
    box.addEventListener("click", open);
    box.addEventListener("keydown", ({ key }) => { if (key === "Enter") open(); });
  }

  if (sections.length) {
    const choice = byId("pipeline-choice");
    choice.append(...sections.map((s) =>
      element("option", { value: String(s.number) }, `${s.number}  ${s.kind}  ${s.name}  (${seconds(s.predicted)})`)));
    choice.addEventListener("change", () => choose(Number(choice.value), false));
    for (const button of document.querySelectorAll("[data-step]")) {
      button.addEventListener("click", () =>
        choose((chosen + Number(button.dataset.step) + sections.length) % sections.length, false));
    }
    showSection();
    markBox();
  }

  // Hover texts. Plotly parses tags and entities in them, so names are escaped.
  const MOST_LETTERS = 72;
  function name(text) {
    const head = Math.floor(MOST_LETTERS / 3);
    const cut = text.length > MOST_LETTERS ? `${text.slice(0, head)}…${text.slice(head + 1 - MOST_LETTERS)}` : text;
    return cut.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  const heading = (number) =>
    Number.isInteger(number) ? `<b>${number}  ${name(sections[number].name)}</b><br>${sections[number].kind}` : `<b>${name(number)}</b>`;
  const hovers = {
    sections: (number) => {
      const s = sections[number];
      return `${heading(number)}, ${s.operators} operators, ${bytes(s.read + s.written)} of traffic<br>` +
        `predicted ${seconds(s.predicted)}: compute ${seconds(s.compute)}, memory ${seconds(s.memory)}, ` +
        `fill ${seconds(s.fill)}, launch ${seconds(s.launch)}<br>` +
        `compute in use ${percent(computeShare(s))}, memory ${percent(memoryShare(s))}, bound by ${name(s.bound)}`;
    },
    spans: (number, place, trace) => {
      const [start, lasts] = [trace.base[place], trace.x[place]];
      return `${heading(number)}${Number.isInteger(number) ? "" : `<br>${trace.name}`}<br>predicted ${seconds(lasts)}, ` +
        `from ${seconds(start)} to ${seconds(start + lasts)}`;
    },
    memory: (number, place, trace) => (number === null ? "before the first section" :
      `${heading(number)}<br>predicted ${bytes(trace.y[place])} of tensors between sections`),
    roofline: (number, place, trace) => {
      const fold = folds.find((one) => one.number === number);
      return `${heading(number)}${fold.runs > 1 ? `, ×${fold.runs}` : ""}<br>${name(fold.line)}<br>predicted ${seconds(fold.total)}, ` +
        `${count(trace.y[place])}FLOP/s at ${trace.x[place].toFixed(1)} FLOPs per byte, bound by ${name(fold.bound)}`;
    },
  };

  // Time axes with and without the host.
  for (const button of document.querySelectorAll("[data-plot]")) {
    button.addEventListener("click", () => {
      const hidden = button.ariaPressed !== "true";
      button.ariaPressed = String(hidden);
      const range = [hidden ? Number(button.dataset.from) : 0, Number(button.dataset.to)];
      Plotly.relayout(byId(button.dataset.plot), { "xaxis.range": range });
    });
  }

  // Figures.
  // Only these buttons: one of plotly's defaults uploads the chart to a server.
  const config = (layout) => ({
    responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtons: [layout.xaxis.fixedrange ? ["toImage"] : ["zoom2d", "pan2d", "resetScale2d", "toImage"]],
  });
  for (const [id, { data: traces, layout }] of Object.entries(data.figures)) {
    const place = byId(id);
    for (const trace of traces.filter(({ meta }) => meta in hovers)) {
      trace.hovertext = trace.customdata.map((number, at) => hovers[trace.meta](number, at, trace));
      Object.assign(trace, { hoverinfo: "text" }, trace.type === "bar" && !trace.text ? { textposition: "none" } : {});
    }
    Plotly.newPlot(place, traces, layout, config(layout));
    place.on("plotly_click", ({ points }) => {
      const number = points[0].customdata;
      if (Number.isInteger(number)) choose(number, true);
    });
  }
})();
