// Search without a server: browsers refuse workers on pages that were opened from a disk, so the theme's search runs in
// a hidden frame there. Its script is loaded as in a worker: it listens to "message" and answers by postMessage.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<body></body>";
      this.ready = new Promise((done, failed) => {
        this.frame.onload = () => {
          const inside = this.frame.contentWindow;
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          Object.assign(script, { src: url, onload: () => done(inside), onerror: failed });
          inside.document.body.append(script);
        };
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
