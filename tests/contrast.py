"""Which texts of a page cannot be read for lack of contrast: a script for the browser."""

CONTRAST = """() => {
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const paint = (colours) => { pen.clearRect(0, 0, 1, 1);
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3); };
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = (rgb) => rgb.reduce((sum, value, i) => sum + [0.2126, 0.7152, 0.0722][i] * linear(value / 255), 0);
  const low = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, text = texts.currentNode.data.trim();
    if (!text || !element.checkVisibility() || element.closest(".hidden-words, svg")) continue;
    const behind = [];
    for (let at = element; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
    const below = light(paint(behind)), above = light(paint([...behind, getComputedStyle(element).color]));
    const ratio = (Math.max(below, above) + 0.05) / (Math.min(below, above) + 0.05);
    if (ratio < 4.5) low.push(`${text} ${ratio.toFixed(2)}`);
  }
  return low;
}"""
