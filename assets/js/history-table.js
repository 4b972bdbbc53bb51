/* The table of runs. Rows arrive as JSON and are set with textContent only: a run's name or prompt is foreign text.
   The selection is a set of ids kept here, so that it survives paging, sorting and filtering. */
(() => {
  const shell = (window.RedlineShell = window.RedlineShell || {});
  const selected = new Set();

  const el = (tag, cls, text) => {
    const node = document.createElement(tag);
    if (cls) node.className = cls;
    if (text !== undefined && text !== null) node.textContent = text;
    return node;
  };

  const when = (iso) => {
    const date = new Date(iso);
    if (Number.isNaN(date.getTime())) return iso;
    const pad = (n) => String(n).padStart(2, "0");
    const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
    return `${day} ${pad(date.getHours())}:${pad(date.getMinutes())}`;
  };

  const STATES = { done: "✓ done", running: "… running", stopped: "■ stopped", failed: "✕ failed", interrupted: "⚡ interrupted" };

  const cell = (label, text, why) => {
    const td = el("td");
    td.dataset.label = label;
    if (text === null || text === undefined || text === "") td.append(el("span", "rl-why-not", why || "none"));
    else td.append(el("span", "", text));
    return td;
  };

  const drawRow = (row, columns) => {
    const tr = el("tr");
    tr.dataset.id = row.id;
    const pick = el("td", "rl-pick");
    const box = el("input");
    box.type = "checkbox";
    box.checked = selected.has(row.id);
    box.setAttribute("aria-label", `select run ${row.name || row.prompt}`.slice(0, 120));
    pick.append(box);
    tr.append(pick);
    tr.classList.toggle("rl-picked", box.checked);

    const run = el("td", "rl-run-cell");
    run.dataset.label = columns.name;
    const open = el("button", "rl-open", row.name || row.prompt);
    open.type = "button";
    open.title = `${row.prompt}\n${row.id}`;
    run.append(open);
    if (row.name) run.append(el("div", "rl-sub", row.prompt));
    const extras = el("div", "rl-extras");
    if (row.state !== "done") extras.append(el("span", `rl-state rl-state-${row.state}`, STATES[row.state] || row.state));
    if (row.archived) extras.append(el("span", "rl-state", "archived"));
    if (row.imported) extras.append(el("span", "rl-state", "imported"));
    for (const tag of row.tags) extras.append(el("span", "rl-tag", tag));
    if (row.note) extras.append(el("span", "rl-note", row.note));
    if (extras.childNodes.length) run.append(extras);
    tr.append(run);

    const time = cell(columns.created_at, when(row.when));
    time.title = row.when;
    tr.append(time);
    tr.append(cell(columns.target, row.target));
    tr.append(cell(columns.proposer, row.proposer));
    tr.append(cell(columns.k, row.k === null ? null : String(row.k), "no drafts"));
    tr.append(cell(columns.tokens_per_second, row.tps, "no tokens"));
    tr.append(cell(columns.draft_acceptance_rate, row.accepted, row.accepted_why));
    tr.append(cell(columns.speedup, row.speedup, row.speedup_why));
    tr.append(cell(columns.author, row.author));
    for (const index of [5, 6, 7, 8]) tr.children[index].classList.add("rl-num");
    return tr;
  };

  const ORDER = ["name", "created_at", "target", "proposer", "k", "tokens_per_second", "draft_acceptance_rate", "speedup", "author"];

  const drawHead = (value) => {
    const tr = el("tr");
    const th = el("th", "rl-pick");
    const all = el("input");
    all.type = "checkbox";
    all.className = "rl-all";
    all.setAttribute("aria-label", "select every run of this page");
    all.checked = value.rows.length > 0 && value.rows.every((row) => selected.has(row.id));
    th.append(all);
    tr.append(th);
    for (const key of ORDER) {
      const head = el("th");
      head.scope = "col";
      const active = value.sort === key;
      const button = el("button", "rl-sort", value.columns[key] + (active ? (value.descending ? " ↓" : " ↑") : ""));
      button.type = "button";
      button.dataset.key = key;
      head.setAttribute("aria-sort", active ? (value.descending ? "descending" : "ascending") : "none");
      head.append(button);
      tr.append(head);
    }
    return tr;
  };

  const parse = (text) => {
    try {
      return JSON.parse(text);
    } catch {
      return null;
    }
  };

  const drawSignature = { text: null };

  shell.selection = () => JSON.stringify([...selected]);

  shell.historyTable = (element, props, watch, send) => {
    const draw = () => {
      const value = parse(props.value);
      if (!value) return;
      if (value.keep && drawSignature.text !== props.value) {
        selected.clear();
        for (const id of value.keep) selected.add(id);
      }
      drawSignature.text = props.value;
      const host = element.querySelector(".rl-table-host");
      if (!host) return;
      const focus = document.activeElement && host.contains(document.activeElement) ? document.activeElement : null;
      const focusKey = focus && focus.dataset ? focus.dataset.key : null;
      host.replaceChildren();
      if (!value.rows.length) {
        host.append(el("p", "rl-empty", value.empty));
        return;
      }
      const table = el("table", "rl-table");
      const head = el("thead");
      head.append(drawHead(value));
      const body = el("tbody");
      for (const row of value.rows) body.append(drawRow(row, value.columns));
      table.append(head, body);
      host.append(table);
      if (focusKey) host.querySelector(`.rl-sort[data-key="${CSS.escape(focusKey)}"]`)?.focus();
    };

    const tell = () => send("pick", { selected: [...selected] });

    const mark = (tr, on) => {
      tr.classList.toggle("rl-picked", on);
      const box = tr.querySelector("input");
      if (box) box.checked = on;
      if (on) selected.add(tr.dataset.id);
      else selected.delete(tr.dataset.id);
    };

    element.addEventListener("change", (event) => {
      const box = event.target;
      if (!(box instanceof HTMLInputElement) || box.type !== "checkbox") return;
      if (box.classList.contains("rl-all")) {
        element.querySelectorAll("tbody tr").forEach((tr) => mark(tr, box.checked));
      } else {
        const tr = box.closest("tr");
        if (tr) mark(tr, box.checked);
        const all = element.querySelector(".rl-all");
        const rows = [...element.querySelectorAll("tbody tr")];
        if (all) all.checked = rows.length > 0 && rows.every((row) => selected.has(row.dataset.id));
      }
      tell();
    });

    element.addEventListener("click", (event) => {
      const target = event.target instanceof Element ? event.target : null;
      const sort = target && target.closest(".rl-sort");
      if (sort) {
        send("order", { key: sort.dataset.key });
        return;
      }
      const open = target && target.closest(".rl-open");
      const tr = open && open.closest("tr");
      if (tr) send("open_run", { id: tr.dataset.id });
    });

    watch("value", draw);
    draw();
  };
})();
