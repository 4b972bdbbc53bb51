/* While the Playground is on show the address says what it shows: ?run=ID&step=N&token=M. Only a run that the database
   has is named. The other tabs' addresses are shell.js's. Other parameters stay; nothing is loaded from here. */
(() => {
  "use strict";
  const R = window.Redline;
  if (R.address) return;
  const { store } = R;
  const asked = new URLSearchParams(location.search);
  let honoured = false;
  let timer = 0;
  let kept = "";

  const onShow = () => !window.RedlineShell || window.RedlineShell.shownTab() === "playground";
  /** A stored run brings its state; of a run that is made now, the server says when the database has it. */
  const isKept = () => Boolean(store.state.meta && store.state.meta.state) || kept === store.state.run.id;

  const number = (value) => (value !== null && /^\d{1,7}$/.test(value) ? Number(value) : null);

  const write = () => {
    timer = 0;
    const { run, selection, chosen, position, live } = store.state;
    if (!run || !onShow()) return;
    const query = new URLSearchParams(location.search);
    for (const name of ["tab", "compare", "step", "token"]) query.delete(name);
    if (isKept()) query.set("run", run.id);
    else query.delete("run");
    if (chosen === "token" && selection) {
      query.set("step", String(selection.step));
      query.set("token", String(selection.token));
    } else if (chosen === "step" && !live) query.set("step", String(position));
    const text = query.toString();
    const to = `${location.pathname}${text ? "?" + text : ""}${location.hash}`;
    if (to === `${location.pathname}${location.search}${location.hash}`) return;
    try {
      history.replaceState(history.state, "", to);
    } catch {
      /* a page without an address of its own (a saved copy, a frame) has none to keep */
    }
  };
  /** Browsers refuse more than about three changes a second for long. */
  const soon = () => {
    if (!timer) timer = setTimeout(write, 150);
  };

  /** Once, for the run that the address names (or the first one, when it names none). */
  const honour = () => {
    const { run, rows, live } = store.state;
    if (honoured || !run || live || !rows.length) return;
    const wanted = asked.get("run");
    if (wanted && wanted !== run.id) return;
    honoured = true;
    const step = number(asked.get("step"));
    const token = number(asked.get("token"));
    if (step === null || step > store.last()) return;
    if (token !== null && store.valid({ step, token })) store.choose({ step, token });
    else store.moveTo(step, { select: true });
  };

  store.subscribe((event) => {
    // A run of one's own, or another stored one: what the address asked for at first no longer counts.
    const { live, meta, run } = store.state;
    if (event === "run" && (live || (meta && meta.state && asked.get("run") !== run.id && asked.get("run")))) honoured = true;
    if (event === "run" && honoured) soon();
    if (event === "end") honour();
    if (["selection", "chosen", "position"].includes(event) && store.state.chosen) soon();
  });
  R.address = {
    write: soon,
    /** The server's word on which of the runs made here the database has; "" takes it back. */
    keep(id) {
      kept = id || "";
      if (store.state.run) soon();
    },
  };
})();
