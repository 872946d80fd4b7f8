"use strict";
// Polls the snapshot, follows the stream of decisions, and shows both. Everything from the router is
// set as text, never as markup.

const POLL_MS = 2000, RETRY_MS = 1000, MAX_RETRY_MS = 8000, SILENCE_MS = 25000, MAX_ROWS = 100;
const byId = id => document.getElementById(id);
const number = (value, digits = 0) => value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
const percent = value => `${number(100 * value, 1)} %`;
const seconds = value => value === null || value === undefined ? "–" : number(value, 3);
const decisions = new Map();
let key = sessionStorage.getItem("key") || "";
let drawing = false;
let last = null;

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function bar(parts, label) {
  const box = make("span", undefined, {class: "bar", role: "img", "aria-label": label});
  for (const [kind, part] of parts) {
    const piece = make("i", undefined, {class: kind});
    piece.style.width = `${100 * part}%`;
    box.append(piece);
  }
  return box;
}

function fillTable(id, heads, rows) {
  const table = byId(id), head = make("thead"), body = make("tbody"), top = make("tr");
  for (const text of heads) top.append(make("th", text, {scope: "col"}));
  head.append(top);
  for (const cells of rows) {
    const row = make("tr");
    for (const cell of cells) {
      const box = make("td");
      box.append(cell);
      row.append(box);
    }
    body.append(row);
  }
  table.replaceChildren(head, body);
}

const spread = s => `mean ${seconds(s.mean)}, P50 ${seconds(s.p50)}, P90 ${seconds(s.p90)}, P99 ${seconds(s.p99)}`;

function showNow(snap) {
  const total = snap.tokens.local + snap.tokens.pulled + snap.tokens.computed;
  const ready = snap.workers.filter(w => w.state === "ready").length;
  const facts = [
    ["nodes", number(snap.nodes.length)], ["workers ready", `${ready} of ${snap.workers.length}`],
    ["requests so far", number(snap.requests)], ["in flight", number(snap.requests_in_flight)],
    ["waiting for a worker", number(snap.waiting)], ["blocks known", number(snap.view.blocks)],
    ["tokens from cache", total ? percent(1 - snap.tokens.computed / total) : "–"],
    ["hit rate P50", snap.hit_rate.count ? percent(snap.hit_rate.p50) : "–"],
  ];
  byId("now").replaceChildren(...facts.map(([name, value]) => {
    const box = make("div");
    box.append(make("dt", name), make("dd", value));
    return box;
  }));
}

function showDegraded(snap) {
  const modes = snap.degraded.map(m => `${m.reason}; ${m.remedy}`);
  for (const node of snap.nodes) for (const why of node.stats.degraded || []) modes.push(`${node.node}: ${typeof why === "string" ? why : why.reason || JSON.stringify(why)}`);
  for (const worker of snap.workers) if (worker.reason) modes.push(`worker ${worker.worker} is ${worker.state}: ${worker.reason}`);
  byId("degraded").hidden = !modes.length;
  byId("degraded-list").replaceChildren(...modes.map(text => make("li", text)));
}

function showNodes(snap) {
  const rows = [];
  const cards = snap.nodes.map(node => {
    const card = make("li", undefined, node.lease === "held" ? {} : {class: "suspect"});
    card.append(make("b", node.node, {title: node.node}));
    const tiers = Object.entries(node.stats.tiers || {});
    if (!tiers.length) card.append(make("span", "tells nothing yet"));
    for (const [name, tier] of tiers) {
      const full = tier.slots ? tier.resident / tier.slots : 0;
      card.append(bar([["local", full]], `${node.node}, ${name}: ${percent(full)} full`));
      card.append(make("span", `${name} ${percent(full)}${node.lease === "held" ? "" : `, ${node.lease}`}`));
      rows.push([node.node, node.lease, name, number(tier.resident || 0), number(tier.slots || 0),
                 number(tier.pinned || 0), number((tier.resident || 0) * (tier.slot_bytes || 0) / 2 ** 30, 2), number(node.stats.engines || 0)]);
    }
    return card;
  });
  byId("nodes").replaceChildren(...cards);
  const other = ["suspect", "awaited"].map(lease => [lease, snap.nodes.filter(n => n.lease === lease).length]).filter(([, count]) => count);
  byId("nodes-summary").textContent = `${snap.nodes.length} nodes${other.map(([lease, count]) => `, ${count} of them ${lease}`).join("")}`;
  fillTable("nodes-table", ["node", "lease", "tier", "blocks", "of", "pinned", "GiB", "engines"], rows);
}

function showFlow(snap) {
  const {local, pulled, computed} = snap.tokens;
  byId("flow-summary").textContent = `Since the start: ${number(local)} local, ${number(pulled)} pulled, ${number(computed)} computed`;
  drawFlow(snap.series);
  const rows = snap.series.slice(-20).map(b => [new Date(1000 * b.at).toLocaleTimeString(), number(b.requests), number(b.local), number(b.pulled), number(b.computed)]);
  fillTable("flow-table", ["from", "requests", "local", "pulled", "computed"], rows.reverse());
}

function showHits(snap) {
  const rate = snap.hit_rate, bins = snap.hit_histogram;
  byId("hits-summary").textContent = rate.count
    ? `Of the last ${number(rate.count)}: mean ${percent(rate.mean)}, P50 ${percent(rate.p50)}, P90 ${percent(rate.p90)}, P99 ${percent(rate.p99)} (what nine tenths, 99 of 100 reach at least)` : "no request yet";
  drawHits(bins);
  fillTable("hits-table", ["hit rate", "requests"], bins.map((count, i) => [`${Math.round(100 * i / bins.length)} to ${Math.round(100 * (i + 1) / bins.length)} %`, number(count)]));
}

function showTimes(snap) {
  const timed = [...decisions.values()].filter(s => s.ttft_s !== null);
  const {observed, without_cache, estimated} = snap.ttft_s;
  byId("ttft-summary").textContent = observed.count ? `Seconds, last ${observed.count} streams: ${spread(observed)}` : "no streamed request yet";
  byId("outcome-summary").textContent = observed.count ? `P50 of the estimates ${seconds(estimated.p50)} s, of the outcomes ${seconds(observed.p50)} s` : "no streamed request yet";
  const names = ["mean", "p50", "p90", "p99"];
  fillTable("ttft-table", ["", "mean", "P50", "P90", "P99"], [["with the cache, observed", ...names.map(n => seconds(observed[n]))], ["without, estimated", ...names.map(n => seconds(without_cache[n]))]]);
  fillTable("outcome-table", ["request", "estimate, s", "outcome, s"], timed.slice(-20).reverse().map(s => [s.id.slice(-8), seconds(s.estimate_s), seconds(s.ttft_s)]));
  if (timed.length) { drawTtft(timed); drawOutcome(timed); }
}

function prefixItem(entry) {
  const item = make("li");
  item.append(make("code", entry.prefix), ` ${number(entry.tokens)} tokens, ${number(entry.requests)} requests`);
  if (entry.children.length) {
    const inner = make("ul", undefined, {role: "list"});
    inner.append(...entry.children.map(prefixItem));
    item.append(inner);
  }
  return item;
}

function showLinks(snap) {
  const fastest = Math.max(1, ...snap.links.map(l => l.bytes_per_s));
  byId("links-summary").textContent = snap.links_total ? `${number(snap.links_total)} measured${snap.links_total > snap.links.length ? `, the ${snap.links.length} most used shown` : ""}` : "nothing was pulled yet";
  fillTable("links-table", ["from", "to", "link", "", "MB/s", "set-up, ms", "pulls"], snap.links.map(l => [
    l.from, l.to, l.link, bar([["pulled", l.bytes_per_s / fastest]], `${number(l.bytes_per_s / 1e6)} megabytes a second`),
    number(l.bytes_per_s / 1e6), number(1000 * l.setup_s, 1), number(l.pulls)]));
}

function showDecisions() {
  if (byId("pause").checked) return;
  const rows = [...decisions.values()].reverse().map(s => {
    const row = make("tr"), computed = Math.max(0, s.tokens - s.local - s.pulled), all = Math.max(1, s.tokens);
    const origin = make("td");
    origin.append(bar([["local", s.local / all], ["pulled", s.pulled / all], ["computed", computed / all]], `${s.local} local, ${s.pulled} pulled, ${computed} computed`),
                  `${number(s.local)} / ${number(s.pulled)} / ${number(computed)}`);
    row.append(make("td", new Date(1000 * s.at).toLocaleTimeString()), make("td", s.node), make("td", number(s.tokens)), origin,
               make("td", seconds(s.estimate_s)), make("td", seconds(s.ttft_s)), make("td", s.reason, {class: "why"}));
    row.dataset.request = s.id;
    return row;
  });
  byId("decisions").replaceChildren(...rows);
}

function note(seen) {
  decisions.set(seen.id, seen);
  while (decisions.size > MAX_ROWS) decisions.delete(decisions.keys().next().value);
  if (seen.missed) byId("missed").textContent = `${number(seen.missed)} events were missed: the router decides faster than this page reads.`;
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; showDecisions(); });
}

function show(snap) {
  last = snap;
  decisions.clear();
  for (const seen of snap.decisions) decisions.set(seen.id, seen);
  showNow(snap); showDegraded(snap); showNodes(snap); showFlow(snap); showHits(snap); showTimes(snap); showLinks(snap); showDecisions();
  byId("prefixes").replaceChildren(...(snap.prefixes.length ? snap.prefixes.map(prefixItem) : [make("li", "no prefix was asked for twice yet")]));
}

function say(text, lost = false) {
  const box = byId("connection");
  box.classList.toggle("lost", lost);
  if (box.textContent !== text) box.textContent = text;
}

function ask(path, signal) {
  return fetch(path, {signal, cache: "no-store", headers: key ? {Authorization: `Bearer ${key}`} : {}});
}

const pause = ms => new Promise(done => setTimeout(done, ms));

async function poll() {
  for (;;) {
    try {
      const answer = await ask("/dashboard/snapshot", AbortSignal.timeout(SILENCE_MS));
      byId("key-form").hidden = answer.status !== 401;
      if (answer.ok) { show(await answer.json()); say("live"); }
      else say(answer.status === 401 ? "needs a key" : `the router answers ${answer.status}`, true);
    } catch (error) {
      say("the router does not answer; trying again", true);
    }
    await pause(document.hidden ? 5 * POLL_MS : POLL_MS);
  }
}

async function follow() {
  for (let wait = RETRY_MS;;) {
    const given = new AbortController();
    let timer = setTimeout(() => given.abort(), SILENCE_MS);
    try {
      const answer = await ask("/dashboard/events", given.signal);
      if (answer.ok) {
        wait = RETRY_MS;
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let text = "";;) {
          const {value, done} = await reader.read();
          if (done) break;
          clearTimeout(timer);
          timer = setTimeout(() => given.abort(), SILENCE_MS);
          const events = (text + value).split("\n\n");
          text = events.pop();
          for (const event of events) {
            const data = event.split("\n").find(line => line.startsWith("data: "));
            if (data) note(JSON.parse(data.slice(6)));
          }
        }
      }
    } catch (error) {
      if (!(error instanceof TypeError || error.name === "AbortError")) throw error; // not the network: a fault
    } finally {
      clearTimeout(timer);
    }
    await pause(wait);
    wait = Math.min(MAX_RETRY_MS, 2 * wait);
  }
}

byId("key-form").addEventListener("submit", event => {
  event.preventDefault();
  key = byId("key").value;
  sessionStorage.setItem("key", key);
  byId("key").value = "";
});
byId("pause").addEventListener("change", showDecisions);

function redraw() {
  forgetCharts();
  if (last) show(last);
}
let width = innerWidth;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", () => {
  if (innerWidth === width) return; // a phone's address bar that comes and goes
  width = innerWidth;
  redraw();
});
poll();
follow();
