/* The scrubber: go through any run step by step, without a model. It heads the ladder's card. */
(() => {
  "use strict";
  const R = window.Redline;
  R.views = R.views || {};
  if (R.views.scrubber) return;
  const { h, icon, store, fmt } = R;

  const PATHS = {
    first: "M6 5h2.5v14H6zM20 5v14L9.5 12z", previous: "M17 5v14L7 12z", play: "M7 4.5v15l12-7.5z",
    pause: "M6.5 5h4v14h-4zM13.5 5h4v14h-4z", next: "M7 5v14l10-7z", last: "M15.5 5H18v14h-2.5zM4 5v14l10.5-7z",
  };
  const SPEEDS = [["0.5", "½ step/s"], ["1", "1 step/s"], ["2", "2 steps/s"], ["5", "5 steps/s"], ["0", "as measured"]];

  R.views.scrubber = (root) => {
    const button = (name, words, act) => h(`button.rl-icon-button`, { type: "button", "aria-label": words, title: words, onclick: act, "data-act": name }, icon(PATHS[name]));
    const first = button("first", "First step", () => step(() => store.moveTo(0, { select: true })));
    const previous = button("previous", "Previous step", () => store.moveStep(-1));
    const toggle = button("play", "Play", () => (store.state.playing ? store.stop() : store.play()));
    const next = button("next", "Next step", () => store.moveStep(1));
    const last = button("last", "Last step", () => step(() => store.moveTo(store.last(), { select: true })));
    const slider = h("input.rl-slider", { type: "range", min: "0", max: "0", step: "1", value: "0", "aria-label": "Step of the run" });
    const words = h("span.rl-position.rl-num");
    const speed = h("select.rl-speed", { "aria-label": "Speed of the replay", title: "Speed of the replay" },
      ...SPEEDS.map(([value, label]) => h("option", { value, text: label })));
    speed.value = "1";
    const said = h("span.rl-hidden.rl-said", { "aria-live": "polite" });
    const count = h("span.rl-aside");
    const key = h("span.rl-key", { "aria-label": "Colours of the time bars" },
      ...["draft", "verify", "overhead"].map((part) => h("span", {}, h("i", { "data-part": part }), part)));
    root.append(h("div.rl-head", {}, h("h2.rl-title", { text: "Step by step" }), count, h("span.rl-grow"), key));
    root.append(h("div.rl-transport", { role: "group", "aria-label": "Replay" }, h("div.rl-buttons", {}, first, previous, toggle, next, last), slider, words, speed, said));

    const step = (act) => {
      store.stop();
      act();
    };
    slider.addEventListener("input", () => step(() => store.moveTo(Number(slider.value), { select: true })));
    speed.addEventListener("change", () => store.setSpeed(Number(speed.value)));
    R.marks.keys(root);

    const draw = () => {
      const { position, rows, playing, run, live } = store.state;
      const end = Math.max(0, store.last());
      slider.max = String(end);
      slider.value = String(Math.max(0, position));
      slider.disabled = rows.length < 2;
      slider.style.setProperty("--rl-share", end ? `${(100 * Math.max(0, position)) / end}%` : "0%");
      slider.setAttribute("aria-valuetext", `step ${Math.max(0, position)} of ${end}`);
      const steps = fmt.count(end, "step");
      R.setText(count, rows.length ? `${steps}, ${fmt.count(store.totals.tokens, "token")}${live ? " so far" : ""}` : "");
      R.setText(words, rows.length ? `step ${Math.max(0, position)} of ${end}` : run ? "no step yet" : "");
      for (const [element, off] of [[first, position <= 0], [previous, position <= 0], [next, position >= end || !rows.length], [last, position >= end || !rows.length], [toggle, rows.length < 2]]) {
        if (off && document.activeElement === element) element.setAttribute("aria-disabled", "true");
        else element.removeAttribute("aria-disabled");
        element.disabled = off && document.activeElement !== element;
      }
      if (toggle.dataset.act !== (playing ? "pause" : "play")) {
        toggle.dataset.act = playing ? "pause" : "play";
        toggle.replaceChildren(icon(PATHS[toggle.dataset.act]));
        toggle.setAttribute("aria-label", playing ? "Pause" : "Play");
        toggle.title = playing ? "Pause" : "Play";
      }
    };
    draw();
    return (event, detail) => {
      if (event === "position" && !detail.quiet && !store.state.live) R.setText(said, `step ${store.state.position} of ${store.last()}`);
      if (event === "end") {
        const { run, rows } = store.state;
        R.setText(said, run && rows.length ? `Run ${run.finish_reason === "error" ? "ended with an error" : "finished"}: ${store.totals.tokens} tokens in ${rows.length - 1} steps` : "");
      }
      if (["run", "steps", "position", "play", "end"].includes(event)) draw();
    };
  };
})();
