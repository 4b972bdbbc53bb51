/* window.Redline, the helpers that every other file uses, and the rules for showing untrusted text.

   Text of tokens reaches the page through text nodes and attributes only. Control, bidi and invisible characters are
   replaced by small named badges, so that they can be seen and cannot act. */
(() => {
  "use strict";
  if (window.Redline) return;
  const R = (window.Redline = { version: 1 });

  /** Element `tag.class.class` with children (strings become text nodes) and attributes. */
  const h = (spec, attributes, ...children) => {
    const [tag, ...classes] = spec.split(".");
    const element = document.createElement(tag || "div");
    if (classes.length) element.className = classes.join(" ");
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "text") element.textContent = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
    return element;
  };

  R.h = h;

  /** Icon from one SVG path (24 x 24), coloured by the text colour. */
  R.icon = (path) => {
    const ns = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(ns, "svg");
    svg.setAttribute("viewBox", "0 0 24 24");
    svg.setAttribute("class", "rl-icon");
    svg.setAttribute("aria-hidden", "true");
    const shape = document.createElementNS(ns, "path");
    shape.setAttribute("d", path);
    svg.append(shape);
    return svg;
  };

  R.clear = (element) => element.replaceChildren();
  R.setText = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };
  R.reducedMotion = () => window.matchMedia("(prefers-reduced-motion: reduce)").matches;

  // --- numbers ------------------------------------------------------------------------------------------------

  const NB = "\u00a0";
  const known = (x) => typeof x === "number" && Number.isFinite(x);
  const grouped = new Intl.NumberFormat("en");
  const fmt = (R.fmt = {
    known,
    /** Probability or rate as per cent; never rounds to a certainty that is none. */
    pct(x) {
      if (!known(x)) return "unknown";
      const value = x * 100;
      if (value <= 0) return `0${NB}%`;
      if (value < 0.1) return `<${NB}0.1${NB}%`;
      if (value < 1) return `${value.toFixed(1)}${NB}%`;
      if (value >= 99.95 && value < 100 - 1e-6) return `>${NB}99.9${NB}%`;
      if (value >= 99.5 && value < 99.95) return `${value.toFixed(1)}${NB}%`;
      return `${Math.min(100, Math.round(value))}${NB}%`;
    },
    /** Probability as a decimal with two digits, more where two would say 0 or 1 wrongly. */
    prob(x) {
      if (!known(x)) return "unknown";
      if (x <= 0) return "0";
      if (x >= 1) return "1";
      if (x < 0.0001) return "<" + NB + "0.0001";
      if (x < 0.01) return String(Number(x.toPrecision(1)));
      if (x > 0.995) return String(Math.floor(x * 10000) / 10000);
      return x.toFixed(2);
    },
    ms(x) {
      if (!known(x)) return "unknown";
      if (x >= 10000) return `${(x / 1000).toFixed(1)}${NB}s`;
      if (x >= 1000) return `${(x / 1000).toFixed(2)}${NB}s`;
      return `${x >= 100 ? Math.round(x) : x >= 10 ? x.toFixed(0) : x.toFixed(1)}${NB}ms`;
    },
    ms1: (x) => (known(x) ? `${x.toFixed(1)}` : "unknown"),
    fixed: (x, digits) => (known(x) ? x.toFixed(digits) : "unknown"),
    int: (x) => (known(x) ? grouped.format(Math.round(x)) : "unknown"),
    count: (n, one, many) => `${fmt.int(n)} ${n === 1 ? one : many || one + "s"}`,
  });

  // --- text ---------------------------------------------------------------------------------------------------

  const NAMES = {
    0x00: "NUL", 0x01: "SOH", 0x02: "STX", 0x03: "ETX", 0x04: "EOT", 0x05: "ENQ", 0x06: "ACK", 0x07: "BEL", 0x08: "BS",
    0x0b: "VT", 0x0c: "FF", 0x0d: "CR", 0x0e: "SO", 0x0f: "SI", 0x1b: "ESC", 0x7f: "DEL", 0x85: "NEL", 0xad: "SHY",
    0x61c: "ALM", 0x180e: "MVS", 0x200b: "ZWSP", 0x200e: "LRM", 0x200f: "RLM", 0x2028: "LS", 0x2029: "PS", 0x202a: "LRE",
    0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO", 0x202e: "RLO", 0x2060: "WJ", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI",
    0x2069: "PDI", 0xfeff: "BOM",
  };
  const JOINERS = { 0x200c: "ZWNJ", 0x200d: "ZWJ", 0xfe0e: "VS15", 0xfe0f: "VS16" };
  const MAX_MARKS = 6;
  const isMark = (c) => /\p{M}/u.test(c);
  const badgeName = (code) => {
    if (NAMES[code]) return NAMES[code];
    if (code < 0x20 || (code >= 0x7f && code < 0xa0)) return "x" + code.toString(16).toUpperCase().padStart(2, "0");
    if (code >= 0xe0000 && code <= 0xe007f) return "TAG";
    if (code >= 0xfff9 && code <= 0xfffb) return "U+" + code.toString(16).toUpperCase();
    return null;
  };

  /** Split text into runs: {kind: "text" | "space" | "tab" | "newline" | "badge", text}. `\n`, `\r\n` are one newline;
      a base carries at most six combining marks, the rest is counted in a badge. */
  const pieces = (text) => {
    const found = [];
    let plain = "";
    let marks = 0;
    let dropped = 0;
    const flush = () => {
      if (plain) found.push({ kind: "text", text: plain });
      plain = "";
      if (dropped) found.push({ kind: "badge", text: `+${dropped} marks` });
      dropped = 0;
    };
    const push = (kind, value) => {
      flush();
      found.push({ kind, text: value });
    };
    const onlyJoiners = text !== "" && [...text].every((c) => JOINERS[c.codePointAt(0)]);
    const characters = [...text];
    for (let i = 0; i < characters.length; i += 1) {
      const c = characters[i];
      const code = c.codePointAt(0);
      if (code >= 0xfe00 ? false : code > 0x2ff && isMark(c)) {
        marks += 1;
        if (marks > MAX_MARKS) dropped += 1;
        else plain += i === 0 ? "\u25cc" + c : c;
        continue;
      }
      marks = 0;
      if (dropped) flush();
      if (c === " ") push("space", c);
      else if (c === "\t") push("tab", c);
      else if (c === "\n") push("newline", c);
      else if (c === "\r" && characters[i + 1] === "\n") continue;
      else if (onlyJoiners) push("badge", JOINERS[code]);
      else if (badgeName(code)) push("badge", badgeName(code));
      else plain += c;
    }
    flush();
    return found;
  };

  const GLYPH = { space: "\u2423", tab: "\u21e5", newline: "\u21b5" };

  /** One-line label for attributes and sentences: whitespace as glyphs, badges in brackets, cut at `max` characters. */
  const label = (text, max = 60) => {
    let out = "";
    let length = 0;
    for (const piece of pieces(text.length > 4 * max ? text.slice(0, 4 * max) : text)) {
      const shown = piece.kind === "text" ? piece.text : piece.kind === "badge" ? `[${piece.text}]` : GLYPH[piece.kind];
      out += shown;
      length += [...shown].length;
      if (length > max) break;
    }
    const all = [...out];
    const cut = all.length > max || text.length > 4 * max;
    return cut ? `${all.slice(0, max).join("")}… (${fmt.int(text.length)} characters)` : out;
  };

  /** One line for names that people typed: spaces stay spaces, what cannot be seen is named. */
  const plain = (words, max = 60) => label(String(words).replace(/\s+/g, "\u00a0"), max).replaceAll("\u00a0", " ");

  /** Append text to `element`. `mode`: "flow" real whitespace, "shown" real whitespace with glyphs, "struck" spaces but
      no line breaks, "chip" glyphs only. */
  const render = (element, text, mode = "flow", max = Infinity) => {
    let left = max;
    for (const piece of pieces(Number.isFinite(max) ? text.slice(0, 4 * max) : text)) {
      if (left <= 0) break;
      if (piece.kind === "text") {
        const shown = piece.text.length > left ? [...piece.text].slice(0, left).join("") : piece.text;
        element.append(shown);
        left -= shown.length;
      } else if (piece.kind === "badge") {
        element.append(h("span.rl-badge", { text: piece.text }));
        left -= 2;
      } else {
        if (mode === "flow" || (mode === "struck" && piece.kind === "space")) element.append(piece.text);
        else if (mode === "struck") element.append(h("span.rl-ws", { text: GLYPH[piece.kind] }));
        else if (mode === "chip") element.append(h("span.rl-ws", { text: GLYPH[piece.kind] }));
        else if (piece.kind === "space") element.append(h("span.rl-ws.rl-ws-real", { "data-glyph": "\u00b7" }, " "));
        else element.append(h("span.rl-ws", { text: GLYPH[piece.kind] }), piece.text);
        left -= 1;
      }
    }
    if (text.length > max) element.append(h("span.rl-more", { text: `… ${fmt.int(text.length)} characters` }));
    return element;
  };

  R.text = { pieces, label, plain, render, GLYPH };
})();
