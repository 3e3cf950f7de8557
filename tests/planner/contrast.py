"""The contrast of a page in a browser, by WCAG 2: of every text, and of every colour that says something.

``MEASURE`` runs in the page and returns what has too little: text below 4.5:1 (3:1 where it is large), graphics
below 3:1. What is painted beneath a text or a shape is asked of the browser, at several points of it. Canvases
have no elements: their colours are those that the page's script paints with (``madpipe.hue``), each against what
lies next to it.
"""

from __future__ import annotations

MEASURE = r"""(() => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  const lift = document.createElementNS(document.documentElement.namespaceURI, "style");
  lift.textContent = "*{pointer-events:auto !important}";  // else nothing is found below the pointer's words
  document.documentElement.append(lift);
  const tip = document.getElementById("tip");
  if (tip) { tip.style.display = "block"; tip.textContent = "words at the pointer"; }
  const spare = document.createElementNS("http://www.w3.org/1999/xhtml", "canvas");
  const one = spare.getContext("2d", {willReadFrequently: true});
  const parse = css => {  // red, green, blue, and alpha from 0 to 1
    one.clearRect(0, 0, 1, 1); one.fillStyle = "#0000"; one.fillStyle = css; one.fillRect(0, 0, 1, 1);
    const found = one.getImageData(0, 0, 1, 1).data;
    return [found[0], found[1], found[2], found[3] / 255];
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const luminance = colour => {
    const [r, g, b] = colour.map(each => each / 255).map(
      each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const opacity = element => {
    let product = 1;
    for (let at = element; at; at = at.parentElement) product *= Number(getComputedStyle(at).opacity);
    return product;
  };
  const isShape = element => element instanceof SVGElement && !(element instanceof SVGSVGElement);
  const painted = element => {
    const style = getComputedStyle(element);
    if (!isShape(element)) return parse(style.backgroundColor);
    const fill = style.fill === "none" || element.tagName === "line" ? null : parse(style.fill);
    return fill && fill[3] ? fill : style.stroke === "none" ? [0, 0, 0, 0] : parse(style.stroke);
  };
  const beneath = (element, x, y) => {
    const all = document.elementsFromPoint(x, y), at = all.indexOf(element);
    if (at < 0) return null;  // something else is above it, or it is elsewhere
    const layers = [];
    for (const each of all.slice(isShape(element) ? at + 1 : at)) {
      if (each.tagName === "text" || each.tagName === "CANVAS") continue;
      const colour = painted(each);
      if (colour[3]) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const low = [], least = {text: [99, ""], graphics: [99, ""]};
  let texts = 0, shapes = 0;
  const judge = (kind, ratio, needed, what) => {
    if (ratio < least[kind][0]) least[kind] = [ratio, what];
    if (ratio < needed) low.push(what + ": " + ratio.toFixed(2) + " of " + needed);
  };
  const points = box => [0.1, 0.3, 0.5, 0.7, 0.9].flatMap(
    part => [0.25, 0.5, 0.75].map(height => [box.left + part * box.width, box.top + height * box.height]));
  const name = element => element.tagName.toLowerCase() + (element.id ? "#" + element.id : "") +
    (element.getAttribute("class") ? "." + element.getAttribute("class") : "");
  const seen = new Set();
  for (const element of document.querySelectorAll("body, body *, svg, svg *")) {
    const style = getComputedStyle(element);
    if (["SCRIPT", "STYLE", "TITLE", "DESC", "CANVAS", "OPTION"].includes(element.tagName.toUpperCase())) continue;
    if (style.visibility !== "visible") continue;
    const own = [...element.childNodes].filter(node => node.nodeType === 3 && node.textContent.trim());
    if (own.length || element.tagName === "SELECT") {
      // Of many alike, as in a table, one is enough: same colour, same place in the page's structure.
      const alike = element.tagName === "TD" && [style.color, name(element), element.closest("section")].join();
      if (alike && seen.has(alike)) continue;
      if (alike) seen.add(alike);
      element.scrollIntoView({block: "center"});
      const range = document.createRange();
      const boxes = own.length ? own.flatMap(node => (range.selectNodeContents(node), [...range.getClientRects()]))
        : [element.getBoundingClientRect()];
      const paint = parse(isShape(element) ? style.fill : style.color);
      paint[3] *= opacity(element);
      const size = parseFloat(style.fontSize), isLarge = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
      const found = boxes.flatMap(points).map(([x, y]) => beneath(element, x, y)).filter(Boolean);
      if (!found.length) {
        if (boxes.length) low.push(name(element) + " is hidden: " + element.textContent.slice(0, 40));
        continue;
      }
      texts++;
      judge("text", Math.min(...found.map(ground => contrast(over(paint, ground), ground))), isLarge ? 3 : 4.5,
        name(element) + " '" + element.textContent.trim().slice(0, 30) + "'");
    } else if (/^(rect|circle|line|path)$/.test(element.tagName) || element.matches(".legend i")) {
      if (/\b(page|grid|rest|halo)\b/.test(element.getAttribute("class") || "")) continue;  // grounds and guides
      element.scrollIntoView({block: "center"});
      let spots = points(element.getBoundingClientRect());
      if (element.tagName === "path") {
        const matrix = element.getScreenCTM(), length = element.getTotalLength();
        spots = [0.1, 0.4, 0.7].map(part => element.getPointAtLength(part * length).matrixTransform(matrix))
          .map(point => [point.x, point.y]);
      }
      const paints = isShape(element) ? [style.fill, style.stroke].filter(each => each !== "none").map(parse)
        : [parse(style.backgroundColor)];
      const grounds = spots.map(([x, y]) => beneath(isShape(element) ? element : element.parentElement, x, y));
      const ratios = grounds.filter(Boolean).map(
        ground => Math.max(...paints.map(paint => contrast(over(paint, ground), ground))));
      if (!ratios.length) continue;  // narrower than a pixel
      shapes++;
      judge("graphics", Math.min(...ratios), 3, name(element));
    }
  }
  if (window.madpipe) {
    const hue = madpipe.hue, colour = key => parse(hue[key]);
    const pair = (kind, top, below) => {
      const ratio = contrast(colour(top), colour(below));
      judge(kind, ratio, kind === "text" ? 4.5 : 3, "canvas " + top + " on " + below);
    };
    const kinds = ["F", "R", "B", "W", "S"], terms = ["weights", "stash", "buffers", "transient", "fixed"];
    for (const key of kinds) {
      judge("text", contrast(parse(madpipe.wordsOn[key]), colour(key)), 4.5, "canvas words on " + key);
      pair("graphics", key, "idle");
    }
    for (const key of terms) { pair("graphics", key, "idle"); pair("graphics", key, "ground"); }
    for (const [top, below] of [["F", "ground"], ["B", "ground"], ["select", "ground"], ["limit", "idle"],
      ["dim", "idle"], ["dim", "ground"], ["focus", "ground"]]) pair("graphics", top, below);
    pair("text", "dim", "ground");
  }
  lift.remove();
  scrollTo(0, 0);
  return JSON.stringify({low, least, texts, shapes});
})()"""
