/* A picker: a button with the choice on it, and a list by groups in which every entry says what it is and, where it
   cannot be chosen, why. Names and reasons are foreign text: they are set with textContent only. */
(() => {
  "use strict";
  const R = window.Redline;
  if (R.picker) return;
  const { h } = R;

  const offers = new Map();
  const drawn = new Map();
  const SIGNS = { fetch: "⤓", own: "○", no: "–" };
  const HINTS = { fetch: "not here yet", own: "not available", no: "not available" };
  let count = 0;

  const parse = (text) => {
    try {
      const found = JSON.parse(text);
      return found && Array.isArray(found.groups) ? found : null;
    } catch {
      return null;
    }
  };

  /** What picker `name` offers: JSON of playground.proposer_picker. */
  R.pickerOffers = (name, text) => {
    const found = parse(text);
    if (!found) return;
    offers.set(name, found);
    if (drawn.has(name)) drawn.get(name)();
  };

  const can = (entry) => entry.state === "ready" || entry.state === "fetch";

  R.picker = (root, props, watch, send) => {
    if (!root || root.dataset.drawn) return;
    root.dataset.drawn = "1";
    const { name, label } = root.dataset;
    const id = `rl-pick-${name}-${(count += 1)}`;
    const title = h("span.rl-pick-title");
    const button = h("button.rl-pick-button", {
      type: "button", "aria-haspopup": "listbox", "aria-expanded": "false", "aria-labelledby": `${id}-label ${id}-title`,
    }, title, R.icon("M6 9l6 6 6-6"));
    title.id = `${id}-title`;
    const list = h("div.rl-pick-list", { role: "listbox", tabindex: "0", id: `${id}-list`, "aria-labelledby": `${id}-label` });
    const own = h("input", { type: "text", autocomplete: "off", spellcheck: "false", maxlength: "500", id: `${id}-own` });
    const ownLabel = h("label", { for: `${id}-own` });
    const form = h("form.rl-pick-own", {}, ownLabel, own, h("button", { type: "submit", text: "Use it" }));
    const panel = h("div.rl-pick-panel", { hidden: true }, list, form);
    root.append(h("span.rl-pick-label", { id: `${id}-label`, text: label }), button, panel);

    let entries = [];
    let active = -1;

    const chosen = () => String(props.value || "");
    const option = (index) => list.querySelector(`[data-index="${index}"]`);

    const draw = () => {
      const found = offers.get(name) || { groups: [], own: null };
      const at = active >= 0 && entries[active] ? entries[active].value : null;
      entries = found.groups.flatMap((group) => group.entries);
      const now = entries.find((entry) => entry.value === chosen());
      R.setText(title, now ? now.title : R.text.plain(chosen(), 80) || found.empty || "nothing chosen");
      button.title = title.textContent;
      R.clear(list);
      let index = 0;
      found.groups.forEach((group, n) => {
        const head = group.title ? h("div.rl-pick-head", { id: `${id}-group-${n}`, text: group.title }) : null;
        list.append(h("div.rl-pick-group", { role: "group", "aria-labelledby": head ? head.id : `${id}-label` }, head,
          ...group.entries.map((entry) => row(entry, index++))));
      });
      form.hidden = !found.own;
      if (found.own) {
        R.setText(ownLabel, found.own.label);
        own.placeholder = found.own.hint;
      }
      point(at === null ? -1 : entries.findIndex((entry) => entry.value === at));
      if (!panel.hidden) place();
    };

    const row = (entry, index) => {
      const usable = can(entry);
      const element = h("div.rl-pick-option", {
        role: "option", id: `${id}-${index}`, "data-index": index, "data-value": entry.value, "data-state": entry.state,
        "aria-selected": String(entry.value === chosen()), "aria-disabled": usable ? null : "true",
      });
      element.append(h("span.rl-pick-name", { text: entry.title }));
      if (SIGNS[entry.state]) element.append(h("span.rl-pick-state", {}, h("span", { text: `${SIGNS[entry.state]} `, "aria-hidden": "true" }), HINTS[entry.state]));
      const needs = entry.needs && !entry.reason ? ` Needs ${entry.needs}.` : "";
      if (entry.text) element.append(h("span.rl-pick-text", { text: entry.text + needs }));
      if (entry.reason) element.append(h("span.rl-pick-reason", { text: entry.reason }));
      return element;
    };

    const point = (index, reveal) => {
      list.querySelector(".rl-pick-active")?.classList.remove("rl-pick-active");
      active = index;
      const element = index < 0 ? null : option(index);
      if (element) {
        element.classList.add("rl-pick-active");
        list.setAttribute("aria-activedescendant", element.id);
        if (reveal) element.scrollIntoView({ block: "nearest" });
      } else list.removeAttribute("aria-activedescendant");
    };

    const choose = (index) => {
      const entry = entries[index];
      if (!entry || !can(entry)) return;
      close(true);
      if (entry.value === chosen()) return;
      props.value = entry.value;
      draw();
    };

    /** The panel stands below the button where there is room, and higher where there is not. */
    const place = () => {
      panel.style.top = "";
      if (getComputedStyle(panel).position !== "absolute") return;
      const box = panel.getBoundingClientRect();
      const over = box.bottom - (window.innerHeight - 12);
      if (over > 0) panel.style.top = `${panel.offsetTop - Math.max(0, Math.min(over, box.top - 12))}px`;
    };

    const outside = (event) => {
      if (!root.contains(event.target)) close(false);
    };
    const open = () => {
      panel.hidden = false;
      button.setAttribute("aria-expanded", "true");
      document.addEventListener("pointerdown", outside);
      place();
      point(Math.max(0, entries.findIndex((entry) => entry.value === chosen())), true);
      list.focus({ preventScroll: true });
    };
    const close = (back) => {
      if (panel.hidden) return;
      panel.hidden = true;
      button.setAttribute("aria-expanded", "false");
      document.removeEventListener("pointerdown", outside);
      if (back) button.focus();
    };

    button.addEventListener("click", () => (panel.hidden ? open() : close(true)));
    button.addEventListener("keydown", (event) => {
      if ((event.key === "ArrowDown" || event.key === "ArrowUp") && panel.hidden) {
        event.preventDefault();
        open();
      }
    });
    list.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      const last = entries.length - 1;
      const moves = { ArrowDown: Math.min(last, active + 1), ArrowUp: Math.max(0, active - 1), Home: 0, End: last };
      if (event.key in moves) point(moves[event.key], true);
      else if (event.key === "Enter" || event.key === " ") choose(active);
      else return;
      event.preventDefault();
    });
    list.addEventListener("click", (event) => {
      const element = event.target instanceof Element ? event.target.closest("[data-index]") : null;
      if (element) choose(Number(element.dataset.index));
    });
    root.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || panel.hidden) return;
      event.preventDefault();
      event.stopPropagation();
      close(true);
    });
    panel.addEventListener("focusout", (event) => {
      if (event.relatedTarget && !root.contains(event.relatedTarget)) close(false);
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const typed = own.value.trim();
      if (!typed) return;
      own.value = "";
      close(true);
      send("own", { name: typed });
    });

    watch("value", draw);
    drawn.set(name, draw);
    draw();
  };
})();
