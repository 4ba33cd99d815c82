import sys
from tests.plan.live_run import *
from tests.plan.live_run import _run, PatientTracker
from tests.layouts import GPT,LLAMA,Layout
from tests.pool import run_distributed
import torch
class T(PatientTracker):
    def __init__(self): super().__init__(); self.ops={}; self.best=(0,None); self.cur=None
    def __torch_dispatch__(self,func,types,args=(),kwargs=None):
        self.cur=str(func); return super().__torch_dispatch__(func,types,args,kwargs)
    def _add(self,storage):
        self.ops[id(storage)]=(self.cur,storage.nbytes())
        super()._add(storage)
        if self._live>=self.best[0]:
            self.best=(self._live,[self.ops[k] for k in self._sizes],self.cur)
def f(rank,world,flags,layout):
    trainer=built(flags,layout); st=Stepper(trainer)
    with closing(loader(trainer, trainer.datasets.train, 0)) as batches:
        st.accumulate(batches)
        with T() as tr: st.accumulate(batches)
    return tr.best
if __name__=="__main__":
    r=run_distributed(f,2,{**GPT,"recompute-granularity":"full","recompute-keep":"layer-input"},Layout(tp=2))
    import collections
    for x in r:
        print(x[0],x[2]); 
        for k,v in collections.Counter(x[1]).items():
            if k[1]>4000: print("   ",k,v)

class T2(T):
    def __torch_dispatch__(self,func,types,args=(),kwargs=None):
        if 'sub.Tensor' in str(func) or 'amax' in str(func) or "lt.Scalar" in str(func):
            import time, sys, gc
            n=lambda: [(self.ops[k]) for k in self._sizes if self.ops[k][1]==30720]
            a=n(); time.sleep(.05); b=n()
            print(func,a,b,flush=True)
        return super().__torch_dispatch__(func,types,args,kwargs)
def f2(rank,world,flags,layout):
    trainer=built(flags,layout); st=Stepper(trainer)
    with closing(loader(trainer, trainer.datasets.train, 0)) as batches:
        st.accumulate(batches)
        with T2() as tr: st.accumulate(batches)
    return 0

class T3(T):
    seen=0
    def __torch_dispatch__(self,func,types,args=(),kwargs=None):
        if 'amax' in str(func) and not T3.seen:
            import gc, sys
            T3.seen=1
            for o in gc.get_objects():
                if isinstance(o,torch.Tensor) and o.numel()==7680 and o.dtype==torch.float32 and not isinstance(o,torch.nn.Parameter):
                    if o.untyped_storage().nbytes()==30720:
                      print("TENSOR",o.shape,o.grad_fn, sys.getrefcount(o))
                      for r in gc.get_referrers(o):
                        if r is not globals() and not isinstance(r,list): print("   ref",type(r),str(r)[:200])
            print([ (self.ops[k]) for k in self._sizes if self.ops[k][1]==30720],flush=True)
        return super().__torch_dispatch__(func,types,args,kwargs)
def f3(rank,world,flags,layout):
    trainer=built(flags,layout); st=Stepper(trainer)
    with closing(loader(trainer, trainer.datasets.train, 0)) as batches:
        st.accumulate(batches)
        with T3() as tr: st.accumulate(batches)
    return 0
import weakref
def f4(rank,world,flags,layout):
    trainer=built(flags,layout); st=Stepper(trainer)
    head=trainer.chunk.head
    import megackpt.model.ends as E
    from megackpt.recompute import at
    import time
    def logits(x):
        step=at("head")
        y=step("head.norm",head.norm,x)
        y=E.gather_step(step,"head.gather",head.tp,y)
        wy=weakref.ref(y.untyped_storage())
        z=step("head.logits",head._logits,y)
        del y
        print("after logits", wy() is not None, flush=True)
        return z
    head.logits=logits
    blk=trainer.chunk.layers["0"].mlp
    def fwd(step,x):
        y = step("mlp.norm", blk.norm, x)
        y = E.gather_step(step, "mlp.gather", blk.tp, y)
        wy=weakref.ref(y.untyped_storage())
        y = step("mlp.up", blk.up, y)
        print("after up", wy() is not None, flush=True)
        y = step("mlp.act", blk.activation, y)
        y = step("mlp.down", blk.down, y)
        from megackpt.model.residual import reduce_step
        y = reduce_step(step, "mlp.reduce", blk.tp, y)
        return step("mlp.residual", blk.residual, x, y)
    blk.forward=fwd
    with closing(loader(trainer, trainer.datasets.train, 0)) as batches:
        for c in (False,True):
            st.count_bytes=c
            st.accumulate(batches)
    return 0
