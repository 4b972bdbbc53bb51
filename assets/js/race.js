/* The race: this run and its baseline on one wall clock, replayed from the two measured runs. */
(() => {
  "use strict";
  const R = window.Redline;
  R.views = R.views || {};
  if (R.views.race) return;
  const { h, fmt, store, icon } = R;
  const PLAY = "M7 4.5v15l12-7.5z";
  const PAUSE = "M6.5 5h4v14h-4zM13.5 5h4v14h-4z";
  const RESET = "M12 5a7 7 0 1 1-6.6 4.7l1.9.7A5 5 0 1 0 12 7v3L7.5 6 12 2z";

  /** [[ms since the request began, tokens of this step], ...] of the run on show, as feed.timeline makes it in Python. */
  const timeline = () => {
    const { run, rows } = store.state;
    let now = Math.max(run.ttft_ms || 0, run.prefill_ms || 0);
    return rows.map((row) => {
      if (row.index > 0) now += row.ms;
      return [now, row.step.emitted.length];
    });
  };

  const seconds = (ms) => `${(ms / 1000).toFixed(2)}\u00a0s`;

  R.views.race = (root) => {
    const play = h("button.rl-icon-button", { type: "button", "aria-label": "Play the race", title: "Play the race" }, icon(PLAY));
    const reset = h("button.rl-icon-button", { type: "button", "aria-label": "Back to the start", title: "Back to the start" }, icon(RESET));
    const slider = h("input.rl-slider", { type: "range", min: "0", max: "1000", value: "1000", "aria-label": "Time of the race" });
    const clock = h("span.rl-num.rl-clock");
    const lanes = h("div.rl-lanes");
    const axis = h("div.rl-axis.rl-num", { "aria-hidden": "true" });
    const words = h("p.rl-hint");
    const controls = h("div.rl-transport.rl-race-controls", { "data-own-keys": "" }, play, reset, slider, clock);
    root.append(h("div.rl-head", {}, h("h2.rl-title", { text: "Race" }), h("span.rl-aside", { text: "one clock" })), lanes, axis, controls, words);

    let tracks = [];
    let span = 1;
    let now = 0;
    let started = 0;
    let frame = 0;

    const makeLane = (name, points, kind) => {
      const total = points.length ? points[points.length - 1][0] : 0;
      const tokens = points.reduce((sum, [, n]) => sum + n, 0);
      const fill = h("i.rl-lane-fill");
      const prefill = h("i.rl-lane-prefill", { title: "until the first token" });
      const ticks = h("span.rl-lane-ticks", { "aria-hidden": "true" });
      const count = h("span.rl-lane-count.rl-num");
      const end = h("span.rl-num.rl-lane-total", { text: seconds(total) });
      lanes.append(h("div.rl-lane", { "data-kind": kind, "aria-label": `${name}: ${tokens} tokens in ${seconds(total)}` },
        h("span.rl-lane-name", { text: name }), h("span.rl-lane-track", {}, fill, prefill, ticks), end, count));
      return { points, total, tokens, fill, prefill, ticks, count, end };
    };

    /** A tick per step; very long runs get at most 60, so that the strip stays a strip. */
    const drawTicks = (track) => {
      const every = Math.max(1, Math.ceil(track.points.length / 60));
      track.prefill.style.width = `${((100 * track.points[0][0]) / span).toFixed(2)}%`;
      track.points.forEach(([at], index) => {
        if (index % every === 0) track.ticks.append(h("i", { style: `left:${((100 * at) / span).toFixed(2)}%` }));
      });
    };

    const show = (time) => {
      now = Math.max(0, Math.min(span, time));
      for (const track of tracks) {
        const reached = Math.min(now, track.total);
        track.fill.style.width = `${((100 * reached) / span).toFixed(2)}%`;
        let tokens = 0;
        for (const [at, n] of track.points) {
          if (at > now + 1e-6) break;
          tokens += n;
        }
        R.setText(track.count, `${fmt.int(tokens)} of ${fmt.count(track.tokens, "token")}`);
        track.end.classList.toggle("rl-waiting", now + 1e-6 < track.total);
      }
      slider.value = String(Math.round((1000 * now) / span));
      slider.style.setProperty("--rl-share", `${(100 * now) / span}%`);
      slider.setAttribute("aria-valuetext", seconds(now));
      R.setText(clock, seconds(now));
    };

    const running = () => frame !== 0;
    const halt = () => {
      cancelAnimationFrame(frame);
      frame = 0;
      play.replaceChildren(icon(PLAY));
      play.title = "Play the race";
      play.setAttribute("aria-label", play.title);
    };
    const tick = (clockNow) => {
      show(clockNow - started);
      if (now >= span) halt();
      else frame = requestAnimationFrame(tick);
    };
    const start = () => {
      if (R.reducedMotion()) {
        show(span);
        return;
      }
      if (now >= span) show(0);
      started = performance.now() - now;
      play.replaceChildren(icon(PAUSE));
      play.title = "Pause the race";
      play.setAttribute("aria-label", play.title);
      frame = requestAnimationFrame(tick);
    };
    play.addEventListener("click", () => (running() ? halt() : start()));
    reset.addEventListener("click", () => {
      halt();
      show(0);
    });
    slider.addEventListener("input", () => {
      halt();
      show((span * Number(slider.value)) / 1000);
    });

    const sentence = (ours, theirs) => {
      if (ours.tokens !== theirs.tokens) {
        return `The two texts differ in length (${ours.tokens} and ${theirs.tokens} tokens), so compare the time per token, not the finish.`;
      }
      const gain = theirs.total - ours.total;
      return gain >= 0 ? `Done ${seconds(gain)} before its baseline, the first token included.` : `Done ${seconds(-gain)} after its baseline, the first token included.`;
    };

    const build = () => {
      halt();
      R.clear(lanes);
      tracks = [];
      const { run, end, rows, live } = store.state;
      const baseline = end && end.baseline;
      controls.hidden = !baseline;
      R.clear(axis);
      if (!run || !rows.length || live || !end) {
        R.setText(words, run ? "The race can be seen when the run and its baseline are done." : "Run a prompt with its baseline, and both are replayed here on one clock.");
        return;
      }
      const ours = makeLane("this run", timeline(), "run");
      tracks.push(ours);
      if (baseline) tracks.push(makeLane("baseline", baseline.steps, "baseline"));
      span = Math.max(...tracks.map((t) => t.total), 1);
      tracks.forEach(drawTicks);
      axis.replaceChildren(h("span", { text: "0" }), h("span", { text: seconds(span / 2) }), h("span", { text: seconds(span) }));
      R.setText(words, baseline ? sentence(...tracks) : `No second lane: ${end.no_baseline_reason || "no baseline"}.`);
      show(span);
    };
    build();
    return (event) => {
      if (event === "run" || event === "end") build();
    };
  };
})();
